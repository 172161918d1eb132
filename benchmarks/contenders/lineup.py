"""All contenders for a setting, in the order in which they are shown."""

from contenders.contenders import Absent, Entry, data_parallel, one_stage, penstock_entries, plain_loop
from contenders.jobs import Setting
from contenders.torch_contenders import torch_entries


def entries_of(setting: Setting) -> list[Entry | Absent]:
    """The contenders that fit, and the others with the reason why they do not."""
    return [plain_loop(), one_stage(), data_parallel(setting), *torch_entries(setting), *penstock_entries(setting)]


def find_entry(name: str, setting: Setting) -> Entry:
    """The contender of that name, which fits."""
    (found,) = (entry for entry in entries_of(setting) if entry.name == name and isinstance(entry, Entry))
    return found
