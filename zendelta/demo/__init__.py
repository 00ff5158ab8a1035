"""The demo: two tiny models trained on the spot, without any download, for the other verbs to work on."""

from .measure import perplexity
from .texts import Texts, held_out
from .train import DemoPair, train_pair

__all__ = ["DemoPair", "Texts", "held_out", "perplexity", "train_pair"]
