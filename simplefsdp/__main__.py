"""``python -m simplefsdp``."""

from simplefsdp.cli import main

main()
