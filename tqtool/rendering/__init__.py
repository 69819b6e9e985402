"""Values to text and tables. Pure functions; nothing here prints or measures."""
