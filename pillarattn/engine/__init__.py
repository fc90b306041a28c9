"""Many requests at once over one patched model: scheduler, paged KV pool and offload."""
