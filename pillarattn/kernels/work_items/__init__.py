"""Items of a work list of mixed attention, made on the device: an inner piece of that op."""
