"""How a step is computed: device, precision, one process or many, the whole model or a shard of it."""
