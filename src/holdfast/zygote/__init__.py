"""The process that has imported everything once and forks workers from it, and its messages with the agent."""
