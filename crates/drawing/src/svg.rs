//! The writer of SVG pictures, to be opened in a browser or put into a page. Lengths are pixels; a style is further attributes, each
//! after a blank.

use std::fmt::Write;

/// The style of bold text.
pub const BOLD: &str = " font-weight=\"bold\"";

/// A picture, element after element.
pub struct Svg(String);

impl Svg {
    /// A white picture of `[width, height]`.
    pub fn new([width, height]: [f64; 2]) -> Svg {
        let mut svg = Svg(String::new());
        svg.line(format_args!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" viewBox=\"0 0 {width:.0} \
             {height:.0}\" font-family=\"Helvetica, Arial, sans-serif\" font-size=\"11\" fill=\"#222\">"
        ));
        svg.line(format_args!("<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>"));
        svg
    }

    /// The first line: large and bold.
    pub fn heading(&mut self, at: [f64; 2], content: &str) {
        self.text(at, "start", " font-size=\"15\" font-weight=\"bold\"", content);
    }

    /// The title of the whole picture, which viewers show.
    pub fn title(&mut self, content: &str) {
        self.line(format_args!("<title>{}</title>", escaped(content)));
    }

    /// A line of text whose `anchor` (`start`, `middle`, `end`) is at `[x, y]`.
    pub fn text(&mut self, [x, y]: [f64; 2], anchor: &str, style: &str, content: &str) {
        let content = escaped(content);
        self.line(format_args!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\"{style}>{content}</text>"
        ));
    }

    /// A rectangle `[x, y, width, height]`; `title` is shown where the pointer is over it, unless it is empty.
    pub fn rect(&mut self, [x, y, width, height]: [f64; 4], style: &str, title: &str) {
        let place = format!("x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\"");
        self.titled("rect", &place, style, title);
    }

    /// A circle around `[x, y]`, with a title as a rectangle has.
    pub fn circle(&mut self, [x, y]: [f64; 2], radius: f64, style: &str, title: &str) {
        let place = format!("cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius:.1}\"");
        self.titled("circle", &place, style, title);
    }

    /// A horizontal or vertical line between two points.
    pub fn stroke(&mut self, [x, y]: [f64; 2], [to_x, to_y]: [f64; 2], colour: &str, style: &str) {
        self.line(format_args!(
            "<path d=\"M{x:.1} {y:.1}L{to_x:.1} {to_y:.1}\" stroke=\"{colour}\"{style} fill=\"none\"/>"
        ));
    }

    /// A line through points.
    pub fn polyline(&mut self, points: &[[f64; 2]], colour: &str, style: &str) {
        let list: Vec<String> = points.iter().map(|[x, y]| format!("{x:.1},{y:.1}")).collect();
        let list = list.join(" ");
        self.line(format_args!("<polyline points=\"{list}\" stroke=\"{colour}\" fill=\"none\"{style}/>"));
    }

    /// The text of the picture.
    pub fn finish(self) -> String {
        self.0 + "</svg>\n"
    }

    fn titled(&mut self, element: &str, place: &str, style: &str, title: &str) {
        match title {
            "" => self.line(format_args!("<{element} {place}{style}/>")),
            _ => {
                let title = escaped(title);
                self.line(format_args!("<{element} {place}{style}><title>{title}</title></{element}>"));
            }
        }
    }

    fn line(&mut self, content: std::fmt::Arguments) {
        let _ = writeln!(self.0, "{content}");
    }
}

/// The style of a filled shape.
pub fn fill(colour: &str) -> String {
    format!(" fill=\"{colour}\"")
}

/// Text as an element or an attribute has it.
pub fn escaped(content: &str) -> String {
    content.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
