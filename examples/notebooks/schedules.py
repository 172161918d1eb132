# %% [markdown]
# # Look at schedules
#
# A schedule is a value: it can be proved, simulated and drawn without a model and without a device. Here a stage's
# forward, input backward and weight backward take 10 ms each, and a link carries 12 GB/s.

# %%
import penstock
from penstock.scheduling import Step

ranks, microbatches = 4, 8
layer = penstock.LayerProfile(
    "layer", 10e-3, 20e-3, cut_bytes=8e6, saved_bytes=200e6, parameter_bytes=100e6, weight_seconds=10e-3
)
cluster = penstock.Cluster.uniform(ranks, bandwidth=12e9)


def play(name, stages_per_rank=1):
    profile = penstock.Profile((layer,) * 8, microbatch_size=1)
    schedule = penstock.Schedule(name, ranks, microbatches, stages_per_rank)
    penstock.verify(schedule)  # raises ScheduleError for a wrong one
    return penstock.simulate(schedule, profile, cluster, minibatches=1, split_seconds=0)


# %%
for name, stages_per_rank in (
    ("gpipe", 1),
    ("1f1b-flush", 1),
    ("interleaved", 2),
    ("zb-h1", 1),
    ("zb-v", 2),
    ("v-half", 2),
):
    timeline = play(name, stages_per_rank)
    peak = max(memory.peak_bytes for memory in timeline.memory)
    print(f"{name:12} {timeline.seconds:.3f} s a step, bubble {timeline.bubble:5.1%}, {peak / 1e9:.1f} GB at the peak")

# %% [markdown]
# `1f1b-flush` waits at the beginning and at the end of a step. `zb-v` fills these times with weight backwards, which
# nothing waits for:

# %%
play("1f1b-flush")

# %%
play("zb-v", 2)

# %% [markdown]
# Each action is a word: `0F2@0` is the forward of microbatch 2 on stage 0 with weights of version 0.

# %%
print(*penstock.Schedule("1f1b-flush", ranks, microbatches).row(0, Step(0)))
