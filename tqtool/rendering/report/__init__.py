"""A report or a comparison as text: terminal, Markdown, HTML, JUnit and TSV, each a pure function of it."""
