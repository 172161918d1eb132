# %% [markdown]
# # A fleet
#
# Three jobs share devices of two kinds. A policy says which part of the time each job has on each kind; a simulation
# plays the jobs to their end. Install `penstock[fleet]`.

# %%
from penstock.fleet import POLICIES, Job, Kind, Problem, max_min_fairness

problem = Problem(
    jobs=(Job("vision", steps=1e6), Job("speech", steps=1e6), Job("text", steps=1e6)),
    kinds=(Kind("V100", workers=1, price_per_hour=2.5), Kind("K80", workers=1, price_per_hour=0.45)),
    throughputs=((40, 10), (12, 4), (100, 50)),  # steps per second
)
print(max_min_fairness(problem).explain())

# %% [markdown]
# Other policies divide the same devices in other ways:

# %%
for name in ("max-throughput", "makespan"):
    print(f"{name}\n{POLICIES[name](problem).explain()}\n")
