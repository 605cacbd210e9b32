//! Tables, in a box that scrolls if they are too wide.

use ballast_report::page::{inline, prose};

/// A column with its header.
#[derive(Clone, Copy)]
pub(super) enum Column {
    /// Left-aligned text.
    Text(&'static str),
    /// Right-aligned numbers.
    Number(&'static str),
}

/// A table; its cells are HTML.
pub(super) struct Table {
    columns: Vec<Column>,
    rows: String,
}

impl Table {
    pub(super) fn new(columns: &[Column]) -> Table {
        Table { columns: columns.to_vec(), rows: String::new() }
    }

    pub(super) fn row(&mut self, cells: &[String]) {
        self.row_of("", cells);
    }

    /// Adds a highlighted row.
    pub(super) fn aside(&mut self, cells: &[String]) {
        self.row_of(" class=\"aside\"", cells);
    }

    fn row_of(&mut self, class: &str, cells: &[String]) {
        let cells: String = (self.columns.iter().zip(cells))
            .map(|(column, cell)| match column {
                Column::Text(_) => format!("<td>{cell}</td>"),
                Column::Number(_) => format!("<td class=\"number\">{cell}</td>"),
            })
            .collect();
        self.rows += &format!("<tr{class}>{cells}</tr>\n");
    }

    /// Returns the table as HTML, empty without rows. Its first column stays visible while the others scroll.
    pub(super) fn html(&self) -> String {
        if self.rows.is_empty() {
            return String::new();
        }
        let head: String = (self.columns.iter())
            .map(|column| match column {
                Column::Text(name) => format!("<th>{}</th>", inline(name)),
                Column::Number(name) => format!("<th class=\"number\">{}</th>", inline(name)),
            })
            .collect();
        format!(
            "<div class=\"scroll\"><table class=\"wide\"><thead><tr>{head}</tr></thead>\n<tbody>{}</tbody></table></div>\n",
            self.rows
        )
    }

    /// Returns the table as a collapsible block.
    pub(super) fn folded(&self, summary: &str, caption: &str, open: bool) -> String {
        format!(
            "<details{}><summary>{summary}<span class=\"soft\">{}</span></summary>{}</details>\n",
            if open { " open" } else { "" },
            prose(caption),
            self.html()
        )
    }
}
