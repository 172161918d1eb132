# %% [markdown]
# # Find an order
#
# The named schedules take stages for equal. Where they are not, as with a large head, an order of actions can be
# searched: the fastest that keeps each rank within a limit in bytes, with a lower bound of what any order can reach.

# %%
import penstock
from penstock.planning import find_order

blocks = [penstock.LayerProfile(f"block{i}", 10e-3, 20e-3, 8e6, 400e6, 100e6, weight_seconds=10e-3) for i in range(3)]
head = penstock.LayerProfile("head", 6e-3, 12e-3, 0, 1e9, 400e6, weight_seconds=6e-3)
profile = penstock.Profile((*blocks, head), microbatch_size=1)
cluster = penstock.Cluster.uniform(2, 12e9)
plan = penstock.Plan.uniform(4, stages=2, microbatches=6)

found = find_order(plan, profile, cluster, memory_bytes=5e9, split_seconds=0)
print(found.plan.explanation)

# %% [markdown]
# The order as text. `penstock.scheduling.define_by_programs` reads such rows, so that an order may also be written by
# hand:

# %%
print(*(found.plan.order or ["a named schedule is the fastest"]), sep="\n")

# %% [markdown]
# And the step that it makes:

# %%
penstock.simulate(found.plan, profile, cluster, minibatches=1, split_seconds=0)

# %% [markdown]
# What a step takes with less or more memory:

# %%
print(penstock.frontier(profile, cluster, microbatches=4, limits=(0.75,)))
