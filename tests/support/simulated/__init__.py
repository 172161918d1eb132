"""Devices, streams and backends that behave as a GPU or NCCL may, in any order that their rules allow."""
