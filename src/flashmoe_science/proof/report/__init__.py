"""Records and verdicts as text: terminal, Markdown, HTML, JUnit and README."""
