"""Devices, streams and backends that do what a GPU or NCCL may do, in any order that their rules allow."""
