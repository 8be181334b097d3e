"""Live comparisons need the extra `parity`; without it they are not even collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("transformers") and find_spec("peft") else ["test_*.py"]
