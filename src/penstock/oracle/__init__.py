"""The oracle: what correct means. It runs in one process and shares nothing with the runtime."""
