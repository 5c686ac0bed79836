"""Attack runs with central privacy, and print the epsilon that the attack proves beside the accountant's.

uv run python scripts/audit_privacy.py --noise-multiplier 1 --rounds 1
"""

import argparse

from fedbench.testing.privacy import CONFIDENCE, audit

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--noise-multiplier", type=float, default=1.0, help="standard deviation of the noise / clip")
parser.add_argument("--rounds", type=int, default=1, help="rounds of a run")
parser.add_argument("--clients", type=int, default=20, help="clients, the canary included")
parser.add_argument("--expected", type=float, default=20.0, help="expected clients of a round")
parser.add_argument("--delta", type=float, default=0.01, help="delta of the accountant")
parser.add_argument("--runs", type=int, default=2000, help="attacked runs with the canary, and as many without it")


def main() -> None:
    """Audit a setting of the command line, and print both values of epsilon."""
    args = parser.parse_args()
    found = audit(args.noise_multiplier, args.rounds, args.clients, args.expected, args.delta, args.runs)
    print(
        f"epsilon {found.epsilon:.3f} at delta {args.delta:g} by the accountant; the attack on {found.runs:,} runs of "
        f"each kind proves at least {found.lower_bound:.3f} ({CONFIDENCE:.0%} confidence)"
    )


if __name__ == "__main__":
    main()
