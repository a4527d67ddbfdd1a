"""Command ``sigattn theory``; ``docs/paper-notes.md`` explains every verdict other than "holds"."""

from collections import Counter

from sigattn.theory.statements import check_all
from sigattn.validation import check_at_least


def check_theory(limit: int = 50_000, longest: int = 8) -> None:
    """Check the statements of the theory by computation (1 to 2 minutes on 2 cores).

    Args:
        limit: largest number of tokens (inputs times sequence length) of an enumerated contextual mapping.
        longest: largest sequence length of an enumerated contextual mapping.
    """
    check_at_least(4, {"limit": limit, "longest": longest})  # the smallest with which every statement has a case
    counts: Counter[str] = Counter()
    for s in check_all(limit, longest):
        print(f"{s.verdict}: {s.claim} ({s.where}; {s.cases:,} cases)", flush=True)
        if s.note:
            print(f"    {s.note}")
        counts[s.verdict] += 1
    print(f"{counts.total()} statements: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}")
