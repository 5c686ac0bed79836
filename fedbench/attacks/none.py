"""No attack: all clients are honest."""

from fedbench.attacks.base import Attack


class NoAttack(Attack):
    """No attackers."""

    changes_uploads = False

    def __init__(self):
        super().__init__(fraction=0.0)
