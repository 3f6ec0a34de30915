"""Views of the records: the terminal's table and progress, figures, the HTML report."""
