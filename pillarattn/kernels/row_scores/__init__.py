"""Row scores from known log-sum-exps: an inner piece of the Triton attention kernels."""
