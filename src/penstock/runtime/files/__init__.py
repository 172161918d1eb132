"""Files: plain values as JSON, safetensors files, locks, and directories that appear whole.

Imports no other room of the runtime. Start reading in ``step_directories.py``.
"""
