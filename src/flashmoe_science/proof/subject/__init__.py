"""What is on trial: subjects, operators and suites, ours and a user's."""
