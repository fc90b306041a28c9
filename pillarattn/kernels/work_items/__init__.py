"""Items of a work list of mixed attention, made on the device: an inner piece of that op."""

from __future__ import annotations

from pillarattn.kernels.dispatch import register
from pillarattn.kernels.work_items import reference

register("work_items", "reference", reference.work_items)
register("work_items", "triton", "pillarattn.kernels.work_items.triton_kernel:work_items")
