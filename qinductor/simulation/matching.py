"""What to say of a rule that matches nothing: which part of it, and the names that come near."""

from __future__ import annotations

import difflib
import fnmatch

from .handle import Place
from .spec import Rule


def nothing_matches(rule: Rule, places: list[Place], seen: set[tuple[str, str]]) -> str:
    """An error message. ``places``: the model's modules; ``seen``: (path, operation) pairs."""
    named = [p for p in places if fnmatch.fnmatchcase(p.path, rule.module)]
    if not named:
        wrong, valid = f"no module is named like {rule.module!r}", [p.path for p in places]
        wanted = rule.module
    elif rule.type and not any(set(p.types) & set(rule.type) for p in named):
        wrong = f"no module named like {rule.module!r} is a {' or '.join(rule.type)}"
        valid, wanted = [t for p in named for t in p.types[:1]], rule.type[0]
    else:
        inside = [op for path, op in seen if fnmatch.fnmatchcase(path, rule.module)]
        what = " or ".join(rule.op) if rule.op else "operation that has these roles"
        wrong, valid, wanted = f"no {what} ran in the modules that it names", inside, ""
    near = difflib.get_close_matches(wanted, valid, n=5, cutoff=0.3)
    there = near or sorted(set(valid))[:8]
    return (
        f"{rule} matches nothing: {wrong}. Nearest: {', '.join(map(repr, there)) or 'none'}. "
        "Mend the rule, or give it optional=True."
    )
