//! The console: one read-only page that the master renders itself. No script, nothing loaded from elsewhere.

use std::fmt::Write;
use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{HeaderName, header};
use axum::response::IntoResponse;

use crate::http_api::{PAGE_TOPICS, PageQuery};
use crate::topic::{TopicPage, TopicService};

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#1b2733;\
background:#fbfcfd}h1{font-size:1.4rem;margin:0}dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem;\
color:#4a5a6a}dd{margin:0;color:#1b2733}table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.35rem .8rem \
.35rem 0;border-bottom:1px solid #dde4ea}th{font-weight:600;color:#4a5a6a}td.n,th.n{text-align:right}.pending{color:#a15c00}\
@media(prefers-color-scheme:dark){body{background:#12181e;color:#dbe4ec}dd{color:#dbe4ec}dl,th{color:#93a5b5}\
th,td{border-color:#2a3742}a{color:#7fb6ec}}";

/// Answers `GET /`.
pub(crate) async fn page(
    State(service): State<Arc<TopicService>>,
    query: Result<Query<PageQuery>, QueryRejection>,
) -> impl IntoResponse {
    // A link that makes no sense shows the first page.
    let after = query.ok().and_then(|Query(query)| query.after);
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CACHE_CONTROL, "no-store"),
        (header::CONTENT_SECURITY_POLICY, "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),
        (HeaderName::from_static("x-content-type-options"), "nosniff"),
    ];
    (headers, render(&service, &service.page(after.as_deref(), PAGE_TOPICS)))
}

fn render(service: &TopicService, page: &TopicPage) -> String {
    let mut html = String::with_capacity(4096 + page.topics.len() * 256);
    html.push_str(
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content=\"width=device-width\">",
    );
    html.push_str("<title>Ringmain</title><style>");
    html.push_str(STYLE);
    html.push_str("</style><h1>Ringmain</h1><dl>");
    entry(&mut html, "cluster", &format!("{:016x}", service.cluster_id()));
    match service.broker() {
        Some((broker, survives)) => {
            entry(&mut html, "broker", &format!("{} at {}:{}", broker.broker_id, broker.host, broker.port));
            entry(&mut html, "memory acks survive a killed process", if survives { "yes" } else { "no" });
        }
        None => entry(&mut html, "broker", "starting or stopping"),
    }
    entry(&mut html, "metadata version", &page.version.to_string());
    entry(&mut html, "topics", &page.total.to_string());
    entry(&mut html, "software", concat!("ringmain ", env!("CARGO_PKG_VERSION")));
    html.push_str("</dl><table><thead><tr><th>Topic<th class=n>Id<th class=n>Partitions<th class=n>Stores");
    html.push_str("<th>Durability<th>Floor<th>State<th class=n>Version</thead><tbody>");
    for view in &page.topics {
        let info = &view.info;
        let state = if view.applied { "<td>ready" } else { "<td class=pending>pending" };
        html.push_str("<tr><td>");
        escape(&mut html, &info.name);
        // Writing to a String can't fail.
        let _ = write!(
            html,
            "<td class=n>{}<td class=n>{}<td class=n>{}<td>{}<td>{}{state}<td class=n>{}",
            info.id,
            info.partition_stores.len(),
            info.stores,
            info.settings.durability_default,
            info.settings.durability_floor,
            info.version
        );
    }
    html.push_str("</tbody></table>");
    if page.topics.is_empty() {
        html.push_str("<p>No topics here. Make one: <code>ringmain topic create NAME</code>");
    }
    if let Some(next) = &page.next {
        // Topic names are letters, digits, `_`, `-` and `.`: they need no escape in a link.
        html.push_str("<p><a href=\"/?after=");
        escape(&mut html, next);
        html.push_str("\">next page</a>");
    }
    html.push_str("</html>\n");
    html
}

fn entry(html: &mut String, name: &str, value: &str) {
    html.push_str("<dt>");
    html.push_str(name);
    html.push_str("<dd>");
    escape(html, value);
}

fn escape(html: &mut String, text: &str) {
    for letter in text.chars() {
        match letter {
            '<' => html.push_str("&lt;"),
            '>' => html.push_str("&gt;"),
            '&' => html.push_str("&amp;"),
            '"' => html.push_str("&quot;"),
            _ => html.push(letter),
        }
    }
}
