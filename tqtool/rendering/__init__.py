"""Values to text: tables, reports and the C header. Pure functions; nothing here prints or measures."""
