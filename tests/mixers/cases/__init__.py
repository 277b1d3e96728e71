"""The cases of the contract test, one file a family of mixers; a new file here is found by itself.

A mixer has at least one case in CASES, which goes through the contract at one length; each main option has
one in OPTIONS, whose values alone are compared. Both go through everything under the marker `grid`.
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
