"""The scheduler: the life of a request, who computes next, and the loop that drives a runner."""
