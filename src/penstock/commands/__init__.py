"""The commands of ``penstock``: one file each, a thin skin over the function of the same name."""

from penstock.commands.completion_command import COMPLETION
from penstock.commands.doctor_command import DOCTOR
from penstock.commands.emit_command import EMIT
from penstock.commands.fleet_command import FLEET
from penstock.commands.init_command import INIT
from penstock.commands.plan_command import PLAN
from penstock.commands.playground_command import PLAYGROUND
from penstock.commands.probe_command import PROBE
from penstock.commands.profile_command import PROFILE
from penstock.commands.rehearse_command import REHEARSE
from penstock.commands.show_command import SHOW
from penstock.commands.simulate_command import SIMULATE
from penstock.commands.verify_command import VERIFY

COMMANDS = (INIT, REHEARSE, PROFILE, PROBE, PLAN, SIMULATE, VERIFY, SHOW, PLAYGROUND, DOCTOR, EMIT, FLEET, COMPLETION)
