"""From the record of a trial to Markdown, JSON, JUnit and HTML."""
