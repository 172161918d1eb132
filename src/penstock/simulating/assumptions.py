"""The simulator's assumptions about the machine and the runtime, beyond the profile and the cluster."""

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, TypedDict, get_args

from penstock.arguments import FLAG, Entries, check_fields, choice, number
from penstock.errors import PlanError

AllReduce: TypeAlias = Literal["ring", "shared"]
"""``ring``: each replica sends 2 (r-1)/r of the weights over its own links. ``shared``: all r replicas send through one
medium, 2 (r-1) times the weights in total, as the recurrence in [PipeDream 2019, section 3.1] prints it."""


class Options(TypedDict, total=False):
    """The keywords of `simulate` and `evaluate`; `Assumptions` documents each of them and its default."""

    update_seconds_per_byte: float
    overlap: bool
    overlap_reduce: bool
    allreduce: AllReduce
    shared_nic: bool
    optimizer_copies: float
    master_copies: float
    version_copies: float
    state_on_host: bool
    shard_optimizer: bool
    slowdowns: tuple[float, ...]
    split_seconds: float


@dataclass(frozen=True, slots=True)
class Assumptions:
    """The simulator's assumptions, each with a default; raises `PlanError` for an invalid one."""

    update_seconds_per_byte: float = 0.0
    """Seconds of an update per byte of the stage's parameters, beside `LayerProfile.update_seconds`."""
    overlap: bool = True
    """Whether ranks compute while they send and receive. If not, the sender is busy while its message is on the link,
    and the receiver is busy for as long ([Narayanan 2021, section 3.4]: communication is added to computation)."""
    overlap_reduce: bool = True
    """Whether the all-reduce of gradients starts during the last backward before it, bucket by bucket."""
    allreduce: AllReduce = "ring"
    shared_nic: bool = False
    """Whether all ranks of a server (a group of the cluster's innermost level) share one link to each other server."""
    optimizer_copies: float = 2.0
    """Optimizer state in units of the weights: 2 for Adam, 1 for momentum, 0 for plain SGD."""
    master_copies: float = 0.0
    """Weights of full precision in units of those that compute: 2 for float32 beside bfloat16."""
    version_copies: float = 1.0
    """One version of the weights in units of those that the profile measured: 0.5 for bfloat16 versions of float32
    weights (`Pipeline(version_dtype=...)`), beside 1 of `master_copies`."""
    state_on_host: bool = False
    """Whether the optimizer's state and the versions that are not in use are on the host."""
    shard_optimizer: bool = False
    """Whether each replica of a stage steps a part of its parameters, and has the optimizer's state of that part."""
    slowdowns: tuple[float, ...] = ()
    """How ranks that share the cores of one host slow each other down: while k of them compute, each takes
    ``slowdowns[k - 1]`` times as long as alone. Empty: every rank has a device of its own."""

    split_seconds: float = 3e-4
    """How much longer a split backward takes than a whole one, for each microbatch on each stage, where the profile
    does not say so (`Profile.split_share`). Measured on a CPU core, stages of 2 to 9 small layers: 200 to 570 us."""

    def __post_init__(self) -> None:
        slower = "slowdowns[k - 1] is how many times as long a computation takes while k ranks compute"
        rules = {field.name: FLAG if isinstance(field.default, bool) else number(0) for field in fields(self)}
        check_fields(
            self,
            {**rules, "slowdowns": Entries(number(above=0).but(slower)), "allreduce": choice(get_args(AllReduce))},
            PlanError,
        )

    @property
    def kept_copies(self) -> float:
        """`optimizer_copies` on the device."""
        return 0.0 if self.state_on_host else self.optimizer_copies
