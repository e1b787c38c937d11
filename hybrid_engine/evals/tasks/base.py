"""What a task is: a name, and how to make groups of samples of a given length."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from hybrid_engine.evals.metrics import Metric, all_found
from hybrid_engine.evals.samples import Builder, Group

BATCH_SAMPLES = 16
"""About so many samples are sent to the model together."""

GroupId = tuple[int, int]
"""The length, and the number of the group at that length."""


class Task(ABC):
    """One kind of question."""

    name: str
    about: str
    """One line for people."""
    max_tokens: int
    """What an answer may take."""
    metric: Metric = staticmethod(all_found)
    metric_name: str = "score"
    questions_per_document: int = 1

    @abstractmethod
    def make_group(self, builder: Builder, length: int, number: int) -> Group:
        """Return one document of a length and its questions. Raises LengthError when the length can't be had."""

    def indexes(self, number: int) -> range:
        """Return the indexes of a group's samples."""
        return range(number * self.questions_per_document, (number + 1) * self.questions_per_document)

    def num_samples(self, wanted: int) -> int:
        """Return how many samples of a length there are where so many are wanted: whole groups."""
        return self.num_groups(wanted) * self.questions_per_document

    def num_groups(self, num_samples: int) -> int:
        """Return how many documents of a length have at least so many questions."""
        return -(-num_samples // self.questions_per_document)

    def batches(self, lengths: Sequence[int], num_samples: int) -> Iterator[list[GroupId]]:
        """Yield the groups in the order in which they are run, those together that are sent together."""
        groups_per_batch = max(1, BATCH_SAMPLES // self.questions_per_document)
        for length in lengths:
            numbers = range(self.num_groups(num_samples))
            for start in range(0, len(numbers), groups_per_batch):
                yield [(length, number) for number in numbers[start : start + groups_per_batch]]
