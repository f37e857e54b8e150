"""Shared by all commands: ranks and devices, the launcher of local ranks, errors of one line."""
