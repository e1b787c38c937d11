"""How a server fares: what clients wait for, with any server that speaks OpenAI's API."""
