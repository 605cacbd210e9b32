//! lab.html: what was found, as one page.
