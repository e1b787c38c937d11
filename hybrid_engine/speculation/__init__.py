"""Who guesses the next tokens. What is guessed never changes an answer, only how many tokens a step brings."""
