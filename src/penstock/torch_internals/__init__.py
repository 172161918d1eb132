"""Private names of PyTorch, each touched in this room only.

A private name may change in any release of PyTorch. Each one that Penstock needs has a function here (a class, where
others must inherit from it) that says what it does, why no public name is enough, and what happens where this PyTorch
lacks the name: the public way, or one error that lists the supported versions. `tests/torch_internals` holds each entry
and each fallback, and names.md beside this file has the names and the versions that they were tried with.

The room imports nothing of Penstock but `errors`. Start reading at `availability.py`.
"""
