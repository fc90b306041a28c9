"""Combining the parts that split attention kernels leave: an inner piece of the Triton kernels."""
