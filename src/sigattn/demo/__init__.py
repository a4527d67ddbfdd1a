"""The demo (``sigattn demo``), and the pages and pictures of the commands' reports."""
