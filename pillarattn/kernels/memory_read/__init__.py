"""Reading memory as fast as the chip can: the ceiling that other kernels are measured against."""
