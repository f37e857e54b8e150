"""What every command needs: ranks and devices, the launcher of local ranks, errors of one line."""
