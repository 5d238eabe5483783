"""What a run will take, before it is started: memory, time and cost, worked out without a GPU."""
