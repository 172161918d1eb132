"""The keys that the processes of a pipeline have written to the store, removed by the last one that leaves.

A process may make many pipelines, and a store keeps what no one deletes.
"""

from collections.abc import Sequence
from contextlib import suppress

from torch.distributed.distributed_c10d import Store


def remove_keys(store: Store, processes: int, others: Sequence[Store] = ()) -> None:
    """Called once by each of the `processes` of `store`, which is theirs alone, when it is done with the store.

    The last one deletes all keys of `store` and of `others`. A store that cannot list its keys or delete them keeps
    them.
    """
    # If the store cannot be reached, its process has ended.
    with suppress(RuntimeError, AttributeError):
        if store.add("left", 1) == processes:
            for own in (store, *others):
                for key in own.list_keys():
                    own.delete_key(key)
