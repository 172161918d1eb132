"""Checkpoints: what a training needs to go on, collected, written, found again and restored, without pickle.

May import what ``assembly`` may, ``assembly`` itself, and ``data`` for loaders. Start reading in
``training_state.py``; the files are written by ``checkpoint_writer.py`` and read by ``checkpoint_reader.py``.
"""
