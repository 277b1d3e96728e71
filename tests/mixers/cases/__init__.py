"""The cases of the contract test, one file a family of mixers.

A mixer has at least one case in CASES, which goes through every test of the contract at every length; each
main option has one in OPTIONS, which goes through them at one length (and at all under the marker `grid`).
"""

from cases import aft, attention, fastmax, hyena, plugins, recurrent

FAMILIES = (hyena, attention, fastmax, aft, recurrent, plugins)
CASES = {name: case for family in FAMILIES for name, case in family.CASES.items()}
OPTIONS = {name: case for family in FAMILIES for name, case in family.OPTIONS.items()}
