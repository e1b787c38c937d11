"""From the text that a model writes to answer, reasoning and tool calls, piece by piece as it comes."""
