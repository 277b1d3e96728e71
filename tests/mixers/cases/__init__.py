"""The cases of the contract test, one file per family of mixers; new files here are found automatically.

A mixer has at least one case in CASES, which runs the contract at one length; each main option has a case in
OPTIONS, of which only the values are compared. Both run everything under the marker `grid`.
"""

import importlib
import pkgutil

FAMILIES = [
    importlib.import_module(f"cases.{module.name}")
    for module in pkgutil.iter_modules(__path__)
    if module.name != "case"
]
CASES = {name: case for family in FAMILIES for name, case in family.CASES.items()}
OPTIONS = {name: case for family in FAMILIES for name, case in getattr(family, "OPTIONS", {}).items()}
