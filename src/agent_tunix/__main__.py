"""`python -m agent_tunix <verb> <overrides>`."""

from agent_tunix.cli import main

main()
