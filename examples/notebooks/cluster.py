# %% [markdown]
# # Plan a cluster that you do not have
#
# A plan needs a profile of the layers and a description of the devices and links. Both may be made up: what would 16
# devices on two hosts do with a model of 16 blocks, and would a faster network pay?

# %%
import penstock

block = penstock.LayerProfile("block", 10e-3, 20e-3, cut_bytes=16e6, saved_bytes=200e6, parameter_bytes=800e6)
profile = penstock.Profile((block,) * 16, microbatch_size=4)


def hosts(gigabits):
    inside, between = 200e9, gigabits * 1e9 / 8  # bytes per second
    return penstock.Cluster.hierarchical([(8, inside), (2, between)], memory_bytes=40e9)


plan = penstock.plan(profile, hosts(100), microbatches=16)
print(plan.explain())

# %% [markdown]
# The plan names the layers and the ranks of each stage; `plan.save("plan.yaml")` writes a file to read and edit, and
# `penstock.Pipeline(..., plan=plan)` trains with it. Would another network pay?

# %%
for gigabits in (10, 400):
    best = penstock.plan(profile, hosts(gigabits), microbatches=16)
    print(f"{gigabits:3} Gbit/s: {best.predicted.samples_per_second:6.1f} samples/s, {str(best).splitlines()[0]}")
