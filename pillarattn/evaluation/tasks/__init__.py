"""Texts and tasks that measurements run on: importing this package registers all tasks."""

from pillarattn.evaluation.tasks.aime24 import AIME24
from pillarattn.evaluation.tasks.base import TASKS, Example, Score, Task, register_task
from pillarattn.evaluation.tasks.gsm8k import GSM8K
from pillarattn.evaluation.tasks.livecodebench import LiveCodeBench
from pillarattn.evaluation.tasks.olympiadbench import OlympiadBench
from pillarattn.evaluation.tasks.rows import load_rows
from pillarattn.evaluation.tasks.text_file import TextFile
from pillarattn.evaluation.tasks.worked_maths_task import WorkedMaths

__all__ = [
    "AIME24",
    "GSM8K",
    "TASKS",
    "Example",
    "LiveCodeBench",
    "OlympiadBench",
    "Score",
    "Task",
    "TextFile",
    "WorkedMaths",
    "load_rows",
    "register_task",
]
