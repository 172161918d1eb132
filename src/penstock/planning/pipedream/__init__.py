"""PipeDream's planner: the fastest slowest stage, replicas in turn, memory inside the dynamic program."""

__all__: list[str] = []
