"""The commands of ``penstock``: one file each, a thin skin over the function of the same name."""

from penstock.commands.diagnosing import DOCTOR
from penstock.commands.planning import PLAN
from penstock.commands.probing import PROBE
from penstock.commands.profiling import PROFILE
from penstock.commands.scheduling_fleets import FLEET
from penstock.commands.showing import SHOW
from penstock.commands.simulating import SIMULATE
from penstock.commands.verifying import VERIFY

__all__ = ["DOCTOR", "FLEET", "PLAN", "PROBE", "PROFILE", "SHOW", "SIMULATE", "VERIFY"]
