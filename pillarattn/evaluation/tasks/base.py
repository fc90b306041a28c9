"""What a task is: rows become problems, problems become prompts, completions become scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pillarattn.registry import Registry


@dataclass(frozen=True)
class Example:
    """One problem of a task.

    Attributes:
        id: names the problem within its data set.
        question: the problem's text.
        answer: the reference answer as text; empty if the task has none.
        solution: a worked solution, for prompts that show solved problems; may be empty.
        extra: whatever else the task's `score` needs.
    """

    id: str
    question: str
    answer: str = ""
    solution: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """What became of one completion.

    Attributes:
        correct: whether the answer is right; None if it was not judged.
        extracted: the answer that was found in the text, or None.
        reason: why it is wrong or was not judged; empty if correct.
    """

    correct: bool | None
    extracted: str | None = None
    reason: str = ""


class Task(ABC):
    """A data set, how to ask a model about it, and how to judge what comes back.

    Attributes:
        name: the registered name.
        source: the hub name of its data, or None if the library writes the data itself.
        subset: configuration of the hub data set, or None.
        split: split of the hub data set.
        files: data files inside the hub repository, for repositories that need them named.
        instruction: what is asked of the model after the problem.
    """

    name: str = ""
    source: str | None = None
    subset: str | None = None
    split: str = "test"
    files: tuple[str, ...] = ()
    instruction: str = ""

    @abstractmethod
    def example(self, row: Mapping[str, Any], index: int) -> Example:
        """Return the problem in a row of the data.

        Raises:
            ValueError: the row lacks a field; see `field_of`.
        """

    @abstractmethod
    def score(self, example: Example, completion: str, *, run_code: bool = False) -> Score:
        """Judge a completion.

        Args:
            run_code: whether a task may execute code that the model wrote.
        """

    def generate_rows(self, count: int) -> Sequence[Mapping[str, Any]]:
        """Return rows that the library writes itself, for tasks without a `source`.

        Raises:
            ValueError: the task has no data of its own.
        """
        raise ValueError(f"task {self.name!r} needs data: give a JSONL path or a hub name")

    def prompt(self, example: Example) -> str:
        """Return what the user says to the model."""
        return f"{example.question}\n\n{self.instruction}" if self.instruction else example.question

    def worked(self, example: Example) -> str:
        """Return the problem with its solution as running text."""
        return f"Problem: {example.question}\nSolution: {example.solution}\n\n"


TASKS: Registry[Task] = Registry("task")


def register_task(name: str) -> Callable[[type[Task]], type[Task]]:
    """Return a class decorator that makes a `Task` available as `task=name`.

    Raises:
        ValueError: the name is taken. TypeError: the class is no `Task`.
    """
    register = TASKS.register(name)

    def add(cls: type[Task]) -> type[Task]:
        if not (isinstance(cls, type) and issubclass(cls, Task)):
            raise TypeError(f"task {name!r} must subclass Task, got {cls!r}")
        register(cls)
        cls.name = name
        return cls

    return add


def field_of(row: Mapping[str, Any], names: Sequence[str], *, task: str, index: int) -> Any:
    """Return the first of `names` that the row has.

    Raises:
        ValueError: it has none of them; the message lists the row's own fields.
    """
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ValueError(
        f"row {index} of the data for task {task!r} has none of the fields "
        f"{', '.join(map(repr, names))}; its fields are {', '.join(map(repr, row))}"
    )
